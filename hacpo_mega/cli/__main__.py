"""`python -m hacpo_mega.cli`: the command line, as every rank of a job starts it."""

from hacpo_mega.cli import main

if __name__ == "__main__":
    main()
