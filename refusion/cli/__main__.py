"""`python -m refusion.cli` is `refusion`."""

from refusion.cli import main

main()
