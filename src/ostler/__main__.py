"""python -m ostler"""

from ostler.cli import main

if __name__ == "__main__":
    main()
