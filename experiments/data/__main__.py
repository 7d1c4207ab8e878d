"""``python -m experiments.data prepare ...``."""

from experiments.data.prepare import app

if __name__ == "__main__":
    app()
