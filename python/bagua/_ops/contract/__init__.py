"""The interface of bucket operations, and the lane that they are built for."""
