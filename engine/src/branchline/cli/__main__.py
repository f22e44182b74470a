"""`python -m branchline.cli`, the form in which the launcher starts its children."""

import sys

from branchline.cli import main

if __name__ == "__main__":
    sys.exit(main())
