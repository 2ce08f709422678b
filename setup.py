"""Packages that a wheel holds beside the library's modules: the presets and the reference curves.

In a checkout they stand in configs/ and docs/reference_curves (mae_vit/config/presets.py finds both). All else is in
pyproject.toml.
"""

from setuptools import find_packages, setup

SHIPPED = {"mae_vit.presets": "configs", "mae_vit.reference_curves": "docs/reference_curves"}

setup(
    packages=[*find_packages(include=["mae_vit*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={"mae_vit.presets": ["*.yaml"], "mae_vit.reference_curves": ["*.json"]},
)
