"""The weights of local training: their anchors, momenta and buffers, by fragment."""
