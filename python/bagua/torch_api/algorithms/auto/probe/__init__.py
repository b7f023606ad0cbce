"""What ``AutoAlgorithm`` measures: links, times of steps, and errors of codecs."""
