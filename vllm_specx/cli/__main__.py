"""`python -m vllm_specx.cli`, the same as `vllm-specx`."""

import sys

from vllm_specx.cli.main import main

sys.exit(main())
