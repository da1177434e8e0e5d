"""`python -m core.plugins list|show|doctor|check|new`"""

import sys

from core.plugins.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
