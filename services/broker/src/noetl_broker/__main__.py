from noetl_broker.main import main

main()
