from noetl_checkpointer.main import main

main()
