from noetl_cli.main import main

main()
