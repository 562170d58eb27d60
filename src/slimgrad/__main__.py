"""`python -m slimgrad` is the command `slimgrad`, for where that is not on the path."""

from slimgrad.cli.main import app

if __name__ == "__main__":
    app(prog_name="slimgrad")
