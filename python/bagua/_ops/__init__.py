"""Operations of buckets, and the lane that they are built for."""
