"""Pretrains an encoder.

python pretrain/run.py --config configs/mae_cifar_tiny.yaml
deepspeed --num_accelerators 2 pretrain/run.py --config configs/mae_cifar_tiny.yaml train.epochs=5
"""

import sys
from pathlib import Path

# Data workers import this file again, under another name: everything heavy stays
# below this line.
if __name__ == "__main__":
    # So that a checkout runs without being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mae_vit.runtime.signals import install_early_handlers

    install_early_handlers()
    from mae_vit.pretraining.job import main

    sys.exit(main())
