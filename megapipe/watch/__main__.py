"""Command that runs a monitor; a rank starts it."""

from megapipe.watch.monitor import main

if __name__ == "__main__":
    main()
