"""The parts of scripts/prepare_data.py."""
