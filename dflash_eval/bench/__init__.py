"""`dflash-eval bench`: the repeatable measurements behind the README's figures."""
