"""The commands of ``python -m compiled_dsa``, one module each."""
