import sys

from vqclip.search.command import main

sys.exit(main())
