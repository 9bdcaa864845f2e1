from noetl_compactor.main import main

main()
