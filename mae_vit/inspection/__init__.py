"""Looking inside an encoder, without a change to how it is trained."""
