"""Fine-tunes a pretrained encoder, or trains a network from scratch, on labels.

python finetune/run.py --ckpt runs/mae_cifar_tiny
python finetune/run.py --ckpt runs/mae_cifar_tiny --config finetune_cifar_tiny data.labels_per_class=500
deepspeed --num_accelerators 2 finetune/run.py --config configs/finetune/finetune_cifar_tiny.yaml
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # So that a checkout runs without being installed.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from mae_vit.runtime.signals import install_early_handlers

    # Before torch is imported, which takes seconds: SIGUSR1 meanwhile would end the process.
    install_early_handlers()
    from mae_vit.finetuning.command import main

    sys.exit(main())
