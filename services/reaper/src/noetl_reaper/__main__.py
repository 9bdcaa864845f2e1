from noetl_reaper.main import main

main()
