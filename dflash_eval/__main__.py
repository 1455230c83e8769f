from dflash_eval.cli import main

main()
