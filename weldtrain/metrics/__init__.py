"""Pure functions of arrays that judge a detector."""
