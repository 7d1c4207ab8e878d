"""``python -m edgc.doctor``. The command is a module of its own: processes that it spawns import it by name."""

import sys

from edgc.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
