import sys

from vqclip.export.command import main

sys.exit(main())
