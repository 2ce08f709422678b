"""Pretrains an encoder.

python pretrain/run.py --config configs/pretrain/mae_cifar_tiny.yaml
deepspeed --num_accelerators 2 pretrain/run.py --config configs/pretrain/mae_cifar_tiny.yaml train.epochs=5
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # So that a checkout runs without being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mae_vit.runtime.signals import install_early_handlers

    # Before torch is imported, which takes seconds: SIGUSR1 meanwhile would end the process.
    install_early_handlers()
    from mae_vit.pretraining.command import main

    sys.exit(main())
