"""``python -m edgc.doctor``. Nothing else is here: processes that are started anew cannot import this module."""

import sys

from edgc.doctor.command import main

sys.exit(main())
