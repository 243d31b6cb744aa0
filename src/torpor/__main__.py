"""``python -m torpor`` is the ``torpor`` command."""

from torpor.cli import main

if __name__ == "__main__":
    main()
