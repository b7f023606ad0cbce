"""``python -m bagua.distributed.launch``: the same as ``bagua.distributed.run``."""

from bagua.distributed.run import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
