"""What a wheel holds beside the library's modules: the presets, and the templates of pages.

In a checkout they stand in configs/ (mae_vit/config/presets.py finds them). All else is in pyproject.toml.
"""

from setuptools import find_packages, setup

SHIPPED = {"mae_vit.presets": "configs"}

setup(
    packages=[*find_packages(include=["mae_vit*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={"mae_vit": ["**/*.jinja"], "mae_vit.presets": ["*.yaml"]},
)
