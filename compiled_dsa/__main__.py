"""``python -m compiled_dsa``: an overview of this machine; ``bench`` measures, ``dump`` shows what is compiled."""

import argparse

from compiled_dsa.cli import bench, dump, overview


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m compiled_dsa", description="Without a command: which provider serves which op here."
    )
    parser.add_argument("--json", action="store_true", help="print the overview as JSON")
    parser.set_defaults(run=overview.run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    bench.add_parser(commands)
    dump.add_parser(commands)
    arguments = parser.parse_args(argv)
    arguments.run(arguments)


if __name__ == "__main__":
    main()
