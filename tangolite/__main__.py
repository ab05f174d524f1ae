"""`python -m tangolite`: the command line."""

import sys

from tangolite.cli import main

if __name__ == "__main__":
    sys.exit(main())
