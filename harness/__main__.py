"""`python -m harness`."""

import sys

if __name__ == "__main__":
    try:
        from harness.cli import main
    except KeyboardInterrupt:  # while the parser is being imported
        print("harness: interrupted", file=sys.stderr)
        sys.exit(130)
    main()
