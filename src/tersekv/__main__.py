"""Entry point of `python -m tersekv`, the same program as `tersekv`."""

from tersekv.cli import main

if __name__ == "__main__":
    main()
