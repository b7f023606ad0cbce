"""Bagua's launchers by their names: ``run`` and ``launch``, both torchrun."""
