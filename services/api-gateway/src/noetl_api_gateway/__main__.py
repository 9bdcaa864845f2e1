from noetl_api_gateway.main import main

main()
