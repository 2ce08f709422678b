"""One file a measurement; each prints JSON with hardware, versions, config and commit."""
