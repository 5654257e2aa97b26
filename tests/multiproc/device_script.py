"""Does as `python -m coarse` in a process that preloaded_devices.py starts."""

from coarse.cli.main import main

raise SystemExit(main())
