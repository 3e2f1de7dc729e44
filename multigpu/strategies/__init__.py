"""Which ways are there to train one model with many processes?"""
