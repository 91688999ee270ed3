"""What every method has to do, for every method."""

from implicit_attention.potentials.prior import GaussianPrior
from implicit_attention.potentials.spin import AmosResponse
from implicit_attention.spins import TAP, AdaTAP, Bethe, Enumeration, MeanField, SaddlePoint, TransferMatrix
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


class TestTAPOfIsingSpins(MethodContract):
    def make(self):
        return TAP()


class TestTAPOfThirdOrder(MethodContract):
    def make(self):
        return TAP(order=3)


class TestTAP(MethodContract):
    dim = 2

    def make(self):
        return TAP(response=AmosResponse())


class TestAdaTAPOfIsingSpins(MethodContract):
    def make(self):
        return AdaTAP()


class TestAdaTAP(MethodContract):
    dim = 3
    # In test_adaptive_tap.py, where fewer fourth derivatives of Bessel functions are taken.
    test_second_derivatives = None

    def make(self):
        return AdaTAP()


class TestAdaTAPOfGaussianSpins(MethodContract):
    dim = 2
    # Their length is not fixed: no lone spin on a sphere answers like them.
    test_spins_without_couplings_answer_alone = None

    def make(self):
        return AdaTAP(prior=GaussianPrior())


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
