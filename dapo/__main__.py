from dapo.cli import main

main()
