"""What benchmarks are made of: cases, inputs, oracle, peers, clocks, records and plots.

``python -m compiled_dsa bench`` (cli/bench.py) and the programs in ``examples/`` use it; nothing else imports it.
"""
