"""What every method has to do, for every method."""

from implicit_attention.potentials.spin import AmosResponse
from implicit_attention.spins import Bethe, Enumeration, MeanField, SaddlePoint, TransferMatrix
from implicit_attention.testing.method import MethodContract


class TestMeanFieldOfIsingSpins(MethodContract):
    def make(self):
        return MeanField()


class TestMeanField(MethodContract):
    dim = 3

    def make(self):
        return MeanField()


class TestMeanFieldWithAmosResponse(MethodContract):
    dim = 4

    def make(self):
        return MeanField(response=AmosResponse())


class TestSaddlePoint(MethodContract):
    dim = 3

    def make(self):
        return SaddlePoint()


class TestOneLoop(MethodContract):
    dim = 3
    # The loop around a lone spin is beyond its response.
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return SaddlePoint(one_loop=True)


class TestSphericalModel(MethodContract):
    dim = 3
    # All parts share one multiplier.
    test_spins_without_couplings_answer_alone = None
    test_parts_without_couplings_between_them_add_up = None

    def make(self):
        return SaddlePoint(shared=True)


class TestBethe(MethodContract):
    def make(self):
        return Bethe()


class TestEnumeration(MethodContract):
    def make(self):
        return Enumeration()


class TestChainOfIsingSpins(MethodContract):
    chain = True

    def make(self):
        return TransferMatrix()


class TestChain(MethodContract):
    chain = True
    dim = 3

    def make(self):
        return TransferMatrix()
