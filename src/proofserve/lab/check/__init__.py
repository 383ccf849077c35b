"""Does a running server keep its promises?"""
