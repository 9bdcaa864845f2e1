from noetl_shard_manager.main import main

main()
