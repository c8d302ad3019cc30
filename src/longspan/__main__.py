"""`python -m longspan`."""

from longspan.cli import main

if __name__ == "__main__":
    main()
