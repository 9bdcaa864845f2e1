from noetl_projection.main import main

main()
