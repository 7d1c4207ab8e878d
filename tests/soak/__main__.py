"""``python -m tests.soak``; every rank that is started imports this file."""

if __name__ == "__main__":
    from tests.soak.program import main

    raise SystemExit(main())
