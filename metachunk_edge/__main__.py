"""`python -m metachunk_edge`: the same as the command `metachunk-edge`."""

from metachunk_edge.cli import main

if __name__ == "__main__":
    main(prog_name="metachunk-edge")
