from noetl_worker.main import main

main()
