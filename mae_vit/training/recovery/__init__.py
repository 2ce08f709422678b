"""Recovery from bad steps and damaged samples."""
