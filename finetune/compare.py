"""Compares starts and networks on the same labels, and writes a report.

python finetune/compare.py --config configs/compare/compare_demo.yaml
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # So that a checkout runs without being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mae_vit.runtime.signals import install_early_handlers

    install_early_handlers()
    from mae_vit.comparison.command import main

    sys.exit(main())
